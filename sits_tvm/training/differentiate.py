"""`differentiate`: the adjoint of a function of a module, whatever it calls."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import IRModule, relax
from tvm.ir.transform import Pass
from tvm.relax import op as R

from relax_passes._adjoint import SUFFIX
from relax_passes.fix_quantize_gradient import FixQuantizeGradient
from relax_passes.gradients import ReverseMode
from relax_passes.gradients.reverse import zeros

from ..diagnostics import Diagnostic, SitsError, collect, emit, raise_errors
from ..module_checks import check_functions
from ..report import Report
from ._inlining import fresh_shapes, straight_line
from ._paths import Paths, cuts, find_paths, obstacles
from ._requests import check_loss, wanted_positions


def differentiate(
    mod: IRModule,
    func: str = "main",
    require_grads: str | relax.Var | Sequence[str | relax.Var] | None = None,
    *,
    target_index: int = 0,
    report: Report | None = None,
) -> IRModule:
    """Add ``<func>_adjoint``: the outputs of `func` and the gradients of one of them.

    What `func` calls is inlined, quantization is given its gradient (`FixQuantizeGradient`), and
    the adjoint is built by the FPrimalGradient of each op between the parameters and the loss. Ops
    that lie on no such path need none. Shapes may be symbolic.

    Parameters
    ----------
    mod : IRModule
        Not changed.
    func : str
        Returns the loss, a float tensor of shape (), alone or in a tuple.
    require_grads : names or variables of arguments, optional
        Floats. Default: the float arguments after the first ``num_input``, or without that
        attribute all float arguments.
    target_index : int
        Which field is the loss, where `func` returns a tuple.
    report : Report, optional
        Gets the quantization sites.

    Returns
    -------
    IRModule
        `mod` and ``<func>_adjoint(*arguments) -> (outputs, (gradient, …))`` as
        `relax.transform.Gradient` adds it, gradients in the order of `require_grads`, each with
        shape and dtype of its parameter. Differentiate a function that calls it for second order.

    Raises
    ------
    SitsError
        With all that is wrong: no module, a function that it does not have, an argument of
        `require_grads` that is unknown or no float, a loss that is no float scalar, every op
        without a gradient on a path (by function and binding), a cast to an integer, a required
        gradient that some binding cuts off.
    """
    check_functions(mod, (func,))
    wanted = wanted_positions(mod[func], func, require_grads)
    check_loss(mod[func], func, target_index)
    flat = _prepared(mod, func, report)
    flat_func = fresh_shapes(flat[func])
    block = _single_block(flat_func, func)
    bindings, target = _target(list(block.bindings), flat_func.body.body, target_index)
    sources = [flat_func.params[i] for i in wanted]
    paths = find_paths(func, bindings, sources, target)
    raise_errors(list(obstacles(paths)))
    _report_cuts(paths, sources, is_default=require_grads is None)
    return _with_adjoint(mod, flat_func, paths, sources, target)


def _prepared(mod: IRModule, func: str, report: Report | None) -> IRModule:
    with collect() as found:
        flat = straight_line(mod, func)
        fix: Pass = FixQuantizeGradient(report=report)
        flat = fix(flat)
    raise_errors(found)
    for diagnostic in found:
        emit(diagnostic)
    return flat


def _single_block(func: relax.Function, name: str) -> relax.DataflowBlock:
    """The one dataflow block of a function; what lies outside is an error."""
    blocks = list(func.body.blocks)
    if len(blocks) == 1 and isinstance(blocks[0], relax.DataflowBlock):
        return blocks[0]
    outside = [
        Diagnostic.error(
            "gradient-impure",
            f"`{binding.var.name}` is an impure call or a branch, which cannot be differentiated",
            function=name,
            binding=binding.var.name,
            ir=f"{binding.var.name} = {binding.value}",
            help="leave prints, assertions and packed calls out; choose with R.where",
        )
        for block in blocks
        if not isinstance(block, relax.DataflowBlock)
        for binding in block.bindings
    ]
    if not outside:
        message = "the function computes nothing"
        help_ = "return a loss that the parameters take part in"
        outside = [Diagnostic.error("gradient-empty", message, function=name, help=help_)]
    raise SitsError(outside)


def _target(
    bindings: list[relax.expr.Binding], result: relax.Expr, index: int
) -> tuple[list[relax.expr.Binding], relax.Var]:
    """The variable that is the loss; bound by an additional binding if it has no name."""
    if isinstance(result, relax.Tuple):
        result = result[index]
    elif isinstance(result.ty, relax.TupleType):
        field = relax.TupleGetItem(result, index)
        loss = relax.DataflowVar("loss", result.ty.fields[index])
        return [*bindings, relax.VarBinding(loss, field)], loss
    return bindings, result


def _report_cuts(paths: Paths, sources: list[relax.Var], is_default: bool) -> None:
    """A gradient that is zero: asked for by name an error, by default a warning."""
    faults = []
    for param in sources:
        if param in paths.reached:
            continue
        found = cuts(paths, param)
        if found and not is_default:
            faults += found
        else:
            message = f"the gradient of `{param.name}` is zero: the loss does not depend on it"
            where = {"function": paths.name, "binding": param.name}
            cut = ", ".join(f"`{d.binding}`" for d in found)
            if cut:
                message = f"the gradient of `{param.name}` is zero: it is cut at {cut}"
            emit(Diagnostic.warning("gradient-zero", message, **where))
    raise_errors(faults)


def _with_adjoint(
    mod: IRModule,
    func: relax.Function,
    paths: Paths,
    sources: list[relax.Var],
    target: relax.Var,
) -> IRModule:
    name = paths.name + SUFFIX
    kept = {gv: f for gv, f in mod.functions.items() if gv.name_hint != name}
    bb = relax.BlockBuilder(IRModule(kept, attrs=mod.attrs))
    attrs = {k: v for k, v in (func.attrs or {}).items() if k != "global_symbol"}
    faults: list[Diagnostic] = []
    with bb.function(name, list(func.params), attrs):
        with bb.dataflow():
            for binding in paths.bindings:
                bb.emit_normalized(binding)
            walk = _walk_back(bb, paths, target, faults)
            gradients = [_output(bb, walk, param) for param in sources]
        bb.emit_func_output(relax.Tuple([func.body.body, relax.Tuple(gradients)]))
    raise_errors(faults)
    result = bb.get()
    result[name] = _without_unused(result[name])
    normalize: Pass = relax.transform.Normalize()
    return normalize(result)


def _without_unused(func: relax.Function) -> relax.Function:
    """TVM's `remove_all_unused` takes time quadratic in the bindings. A cast may bind a shape."""
    (block,), result = func.body.blocks, func.body.body
    used, kept = set(relax.analysis.free_vars(result)), []
    for binding in reversed(block.bindings):
        if binding.var in used or isinstance(binding, relax.MatchCast):
            used.update(relax.analysis.free_vars(binding.value))
            kept.append(binding)
    body = relax.SeqExpr([relax.DataflowBlock(kept[::-1])], result)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _walk_back(
    bb: relax.BlockBuilder, paths: Paths, target: relax.Var, faults: list[Diagnostic]
) -> ReverseMode:
    walk = ReverseMode(bb, lambda var: var in paths.reached, SUFFIX)
    walk.add(target, R.ones(relax.ShapeExpr([]), str(target.ty.dtype)))
    for binding in reversed(paths.bindings):
        try:
            walk.step(binding.var, binding.value)
        except Exception as error:  # a rule may refuse in any way; the binding must be named
            faults.append(_rule_failed(paths.name, binding, error))
    return walk


def _rule_failed(function: str, binding: relax.expr.Binding, error: Exception) -> Diagnostic:
    shown = f"{binding.var.name}: {binding.var.ty} = {binding.value}"
    op = binding.value.op.name.removeprefix("relax.")
    message = f"the gradient of R.{op} refuses: {error}"
    where = {"function": function, "binding": binding.var.name, "ir": shown}
    help_ = "write it with ops or attributes that have a gradient"
    return Diagnostic.error("gradient-refused", message, help=help_, **where)


def _output(bb: relax.BlockBuilder, walk: ReverseMode, param: relax.Var) -> relax.Var:
    adjoint = walk.adjoint(param)
    adjoint = zeros(param.ty) if adjoint is None else adjoint
    return bb.emit_output(adjoint, f"{param.name}{SUFFIX}_out")
