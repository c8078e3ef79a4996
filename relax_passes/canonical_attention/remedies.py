"""What to write instead of a near miss, by the condition that failed."""

REMEDIES = {
    "cast-after-mask": "cast scores before they are masked",
    "einsum-form": "write a matmul, or an einsum of two tensors that sums over one axis",
    "fill-not-constant": "fill hidden scores with one number: -inf, or the lowest of the dtype",
    "fill-not-lowest": "fill hidden scores with -inf, or the lowest number of the dtype",
    "guard-not-proved": "make 0 of the rows where the mask itself hides every key",
    "heads-not-static": "give q, k and v numbers of heads that are constant",
    "layout": "permute or reshape the tensor to (B, H, S, D) before it is multiplied",
    "lengths": "give keys and values one length: the same symbol in their shapes, or R.match_cast",
    "mask-added-in-float16": "add the mask to float32 scores, or hide by where(mask, scores, -inf)",
    "mask-of-scores": "subtract the maximum over the axis of the softmax, or nothing",
    "masks-in-two-dtypes": "cast scores to float32 before the first mask",
    "no-product": "let scores be q kᵀ times a number plus a mask, all in one function",
    "no-query-axis": "let all queries of a head read the same keys, and hide some by a mask",
    "no-value-product": "multiply the weights by values, in the same function",
    "not-float": "cast q, k and v to one float dtype",
    "scale-after-mask": "scale scores before they are masked",
    "scale-not-finite": "scale scores by a finite number other than 0",
    "scores-broadcast": "broadcast q or k before their product",
    "scores-multiplied": "scale q by a factor of each head; hide keys by where, or by adding -inf",
    "shape-unknown": "give tensors their shapes in the signature, or by R.match_cast",
    "softcap-negative": "write c * tanh(scores / c) with a positive c",
    "softmax-axis": "take the softmax over the axis of the keys, and sum the values over it",
    "softmax-form": "write nn.softmax, or exp(x) / sum(exp(x))",
    "softmax-in-function": "make the function private, and inline it by InlinePrivateFunctions",
    "softmax-sum": "write nn.softmax, or divide by the sum over the axis of the keys alone",
    "softmax-unstable": "write nn.softmax, or subtract the maximum of each row",
    "tanh-after-mask": "mask after tanh",
    "tvm-op": "write softmax(scores) v, or R.sits.attention",
    "weights-broadcast": "broadcast the queries or the values before they are multiplied",
    "weights-changed": (
        "multiply softmax(scores) by the values with matmul or einsum; hide keys before the "
        "softmax; export without dropout"
    ),
    "weights-of-gradients": "run CanonicalizeAttention before differentiate",
    "weights-used-elsewhere": "compute what something else reads by a softmax of its own",
}
