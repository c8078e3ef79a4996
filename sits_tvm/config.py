"""What the user asks for: `Config` for a build, `QuantSpec` for the INT4 weights in it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BITS = (2, 3, 4)
GROUP_SIZES = (32, 64, 128, -1)
SCALE_DTYPES = ("float16", "float32")
SCALE_METHODS = ("absmax", "mse")
INTEGER_ACTIVATIONS = ("int8", "int4")
ACTIVATION_SCALES = ("absmax", "power-of-two")
GRAPH_RULES = (  # of PruneRedundantAttention
    "views",
    "common-subexpressions",
    "repeated-heads",
    "double-stabilisation",
    "neutral-operations",
    "hidden-keys",
    "empty-rows",
    "uniform-rows",
    "score-bound",
)
HEAD_RULES = ("zero-heads", "constant-values", "equal-heads", "shared-maps", "low-rank")
ATTENTION_RULES = (*GRAPH_RULES, *HEAD_RULES)


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """How a weight W[N, K] is stored in 4 bits or fewer.

    Parameters
    ----------
    bits : int
        Width of a code: 2, 3 or 4. Each is stored in 4 bits, so fewer save no memory.
    group_size : int
        Consecutive elements along K that share a scale: 32, 64, 128, or -1 for one group per
        output channel. If it does not divide K, the last group of each row is shorter.
    symmetric : bool
        True: codes -2^(bits-1)…2^(bits-1)-1 (-8…7) around zero. False: codes 0…2^bits-1 and one
        zero point per group.
    scale_dtype : str
        "float16" or "float32". Codes are computed from the stored scale.
    scale_method : str
        "absmax" spans the extremes of the group; "mse" shrinks that span to the one with the
        smallest squared error.
    activation : str or None
        None keeps activations in float (W4A16). "int8" quantizes them in every call, each token
        in parts of up to 128 columns (with a group_size of -1 as a whole), for products of integers
        (W4A8, llvm and, from sm_80 on, cuda). "int4" does so with codes -7…7 (W4A4), which costs
        accuracy: in memory two to a byte on cuda; on llvm the kernels, and what they cost, are
        those of "int8". "bfloat16" rounds those of float16 and float32 models to bfloat16, and is
        faster for many rows on CPUs that multiply pairs of them (avx512_bf16; llvm only); sums are
        in float32, results in the model's dtype.
    activation_scale : str
        Of "int8" and "int4" activations: "absmax" is amax / 127 or amax / 7 of a part,
        "power-of-two" the smallest power of two that is no less.

    Raises
    ------
    ValueError
        On any other value, naming it.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    scale_dtype: str = "float16"
    activation: str | None = None
    activation_scale: str = "absmax"
    scale_method: str = "absmax"

    def __post_init__(self) -> None:
        _require("QuantSpec.bits", self.bits, BITS)
        _require("QuantSpec.group_size", self.group_size, GROUP_SIZES)
        _require("QuantSpec.symmetric", self.symmetric, (True, False))
        _require("QuantSpec.scale_dtype", self.scale_dtype, SCALE_DTYPES)
        _require("QuantSpec.scale_method", self.scale_method, SCALE_METHODS)
        _require("QuantSpec.activation", self.activation, (None, *INTEGER_ACTIVATIONS, "bfloat16"))
        _require("QuantSpec.activation_scale", self.activation_scale, ACTIVATION_SCALES)
        if self.activation_scale != "absmax" and self.activation not in INTEGER_ACTIVATIONS:
            raise ValueError(
                f"QuantSpec.activation_scale={self.activation_scale!r} is of activations that are "
                'quantized: write activation="int8" or "int4", too'
            )

    def __str__(self) -> str:
        group = "per channel" if self.group_size == -1 else f"g{self.group_size}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        method = "" if self.scale_method == "absmax" else f", {self.scale_method}"
        activation = "" if self.activation is None else f", {self.activation} activations"
        if self.activation_scale != "absmax":
            activation += f" with {self.activation_scale} scales"
        return f"int{self.bits} {group} {kind}, {self.scale_dtype} scales{method}{activation}"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `build`, `lower` and `check` do to a module.

    Parameters
    ----------
    quant : QuantSpec or None
        INT4 weights; None leaves float weights alone.
    quantize_embedding : bool
        Also store embedding tables (``R.take`` along axis 0 of a weight) in INT4.
    quantize_head : bool
        Also quantize the projection onto the vocabulary.
    skip : tuple of str
        Globs over parameter names (``"*.layers.0.*"``) that stay in float.
    attention : str or frozenset of str
        "exact": attention is recognised, compiled to one fused kernel, and rewritten by every rule,
        none of which changes a value by more than rounding. A set of rules: by these alone; an
        empty set recognises and fuses. "off": attention is left as it is written, and compiled as
        plain matmuls and softmax, also where the module holds `R.sits.attention` already, as it
        does of PyTorch's ``scaled_dot_product_attention``.

        The rules of the graph (`PruneRedundantAttention`) are "views", "common-subexpressions",
        "repeated-heads", "double-stabilisation", "neutral-operations", "hidden-keys",
        "empty-rows", "uniform-rows" and "score-bound"; those of weights, in a build with params
        (`prune_redundant_heads`), are "zero-heads", "constant-values", "equal-heads",
        "shared-maps" and "low-rank".
    gradient_gate : str
        What a build does with a function ``<f>_adjoint`` whose gradients are not those of f: "off"
        does not look, "report" warns in the report, "fail" refuses. It looks at what
        FixQuantizeGradient made: an adjoint that this repairs passes. Needs PyTorch; takes seconds
        per function, more for a large one.
    verify : bool
        Check that the IR is well formed after every pass, and run what CanonicalizeAttention,
        PruneRedundantAttention and (with the weights of each side) prune_redundant_heads change,
        before and after, on this CPU: on normal and on extreme inputs, against float64. A
        difference beyond rounding is an error. Takes seconds per block of attention; rows are in
        `Report.rewrite_checks`.
    database : path or None
        A tuning database of the user's own, a folder as `tune` returns it, looked up before the
        one that ships.
    dump_dir : path or None
        A folder that receives the IR after every pass of TVM's and ours, numbered, in the folders
        ``1_graph`` and ``2_kernels``.

    Raises
    ------
    TypeError, ValueError
        On a wrong type or value, naming the field and what it takes.
    """

    quant: QuantSpec | None = None
    quantize_embedding: bool = False
    quantize_head: bool = False
    attention: str | frozenset[str] = "exact"
    skip: tuple[str, ...] = ()
    gradient_gate: str = "off"
    verify: bool = False
    database: Path | None = None
    dump_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.quant is not None and not isinstance(self.quant, QuantSpec):
            raise TypeError(
                f"Config.quant={self.quant!r}: expected a QuantSpec or None, "
                "for example Config(quant=QuantSpec(group_size=32))"
            )
        if not isinstance(self.skip, list | tuple) or not all(
            isinstance(glob, str) for glob in self.skip
        ):
            raise TypeError(
                f"Config.skip={self.skip!r}: expected a tuple of globs over parameter names, "
                'for example skip=("*.layers.0.*",)'
            )
        object.__setattr__(self, "skip", tuple(self.skip))
        for name in ("quantize_embedding", "quantize_head", "verify"):
            _require(f"Config.{name}", getattr(self, name), (True, False))
        object.__setattr__(self, "attention", _attention(self.attention))
        _require("Config.gradient_gate", self.gradient_gate, ("off", "report", "fail"))
        for name in ("database", "dump_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | Path):
                raise TypeError(f"Config.{name}={value!r}: expected a path or None")
            object.__setattr__(self, name, None if value is None else Path(value))
        if self.quant is None and (self.quantize_embedding or self.quantize_head):
            raise ValueError(
                "Config.quantize_embedding and Config.quantize_head need Config.quant, "
                "for example Config(quant=QuantSpec(), quantize_head=True)"
            )

    @property
    def attention_rules(self) -> frozenset[str]:
        """The names that `attention` stands for."""
        if isinstance(self.attention, frozenset):
            return self.attention
        return frozenset(ATTENTION_RULES if self.attention == "exact" else ())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The Config of a mapping such as a YAML file; ``quant`` is a mapping of its own.

        Raises
        ------
        ValueError
            On a key that is no field, naming the fields there are.
        """
        values = dict(_known(cls, values))
        if isinstance(values.get("quant"), dict):
            values["quant"] = QuantSpec(**_known(QuantSpec, values["quant"]))
        return cls(**values)


def _attention(value: Any) -> str | frozenset[str]:
    """`Config.attention`; names in any collection."""
    if value in ("exact", "off"):
        return str(value)
    names = value if isinstance(value, set | frozenset | list | tuple) else [value]
    unknown = [name for name in names if name not in ATTENTION_RULES]
    if unknown or isinstance(value, str):
        raise ValueError(
            f"Config.attention={value!r} is not supported; it takes 'exact', 'off', or a set of "
            f"rules: {', '.join(ATTENTION_RULES)}"
        )
    return frozenset(names)


def _require(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value == option and type(value) is type(option) for option in allowed):
        options = ", ".join(repr(option) for option in allowed)
        raise ValueError(f"{name}={value!r} is not supported; it takes {options}")


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__}: expected a mapping of its fields, got {values!r}")
    names = [field.name for field in fields(cls)]
    unknown = [key for key in values if key not in names]
    if unknown:
        raise ValueError(
            f"{cls.__name__}: unknown field {', '.join(map(repr, unknown))}; "
            f"the fields are {', '.join(names)}"
        )
    return values
