"""TVM's importer of exported programs, made strict.

Every node is compared with what torch says of it (`node.meta["val"]`): a dtype or a static shape
that differs is an error, an unknown or weaker symbolic shape becomes torch's. Errors are
collected; a value of the right type stands in, so that one run finds them all. Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import sympy
import torch
import tvm
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    TensorArgument,
    TokenArgument,
)
from tvm import relax, tirx
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ..diagnostics import Diagnostic, raise_errors
from ._torch_converters import CONVERTERS
from ._torch_nodes import WatchedCall, source_line
from ._torch_types import Types, same_shape, shapes_differ, to_tvm

_KEPT_WHOLE = (
    *("aten.linear.default", "aten.matmul.default", "aten.scaled_dot_product_attention"),
    "aten.detach.default",
)
_LARGE_BUFFER = 1 << 16
_WITHOUT_MEANING = {"layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit"}
_READS_A_VALUE = ("item.default", "_local_scalar_dense.default")
_GUARDS = (
    "_assert_scalar.default",
    "_assert_tensor_metadata.default",
    "sym_constrain_range_for_size.default",
)
_FAILED = object()  # stands for a value whose type Relax cannot say, after an error
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Core ATen, but linear layers, matmul and attention stay one op each, and detach stays."""
    table = torch.export.default_decompositions()
    for op in [op for op in table if str(op).startswith(_KEPT_WHOLE)]:
        table.pop(op)
    return program.run_decompositions(table)


def _rewrite(name: str) -> str:
    return (
        "rewrite the line with other torch ops, or give a converter: sits_tvm.frontends.torch."
        f'convert_exported_program(torch.export.export(…), {{"{name}": converter}})'
    )


class Importer(ExportedProgramImporter):
    """Converts one exported program.

    Parameters
    ----------
    extra : mapping of str to (node, importer) -> relax.Expr
        Converters by op name, before ours and TVM's.
    """

    def __init__(self, extra: Mapping[str, Callable]) -> None:
        self.extra = extra
        self.errors: list[Diagnostic] = []
        self.unsupported: dict[str, list[torch.fx.Node]] = {}
        self.types = Types()
        super().__init__()

    def create_convert_map(self) -> dict[str, Callable]:
        ours = {
            n: partial(_with_importer, f, self) for n, f in {**CONVERTERS, **self.extra}.items()
        }
        table = {**super().create_convert_map(), **ours}
        return {name: partial(self._convert_node, name, f) for name, f in table.items()}

    def convert(
        self, program: ExportedProgram
    ) -> tuple[tvm.IRModule, dict[str, tvm.runtime.Tensor]]:
        self._check_signature(program)
        inputs, params, constants = self._read_arguments(program)
        variables = {**inputs, **{n: v for n, (v, _, _) in params.items()}}
        variables |= {n: v for n, (v, _) in constants.items()}
        weights = {name: (v, t) for v, name, t in params.values()}
        attrs = {"num_input": len(inputs), **self._bounds(program)}
        mod = self._emit_main(program, variables, attrs)
        self._raise()
        main = mod["main"].bind_params({v: to_tvm(t) for v, t in constants.values()})
        gv = mod.get_global_var("main")
        return tvm.IRModule({gv: main}), {name: to_tvm(t) for name, (_, t) in weights.items()}

    def _emit_main(
        self, program: ExportedProgram, variables: dict[str, relax.Var], attrs: dict[str, Any]
    ) -> tvm.IRModule:
        nodes, module = program.graph.nodes, program.graph_module
        self._check_unsupported_func_type(nodes)
        pure = not self._has_assert_async(module)
        bb = self.block_builder = relax.BlockBuilder()
        arguments = list(dict.fromkeys(variables.values()))
        with bb.function("main", arguments, attrs=attrs, pure=pure):
            if pure and not self._has_cond_op(nodes):
                with bb.dataflow():
                    out = bb.emit_output(self._outputs(program, variables))
            else:
                out = self._outputs(program, variables)
            bb.emit_func_output(out)
        return bb.get()

    def _outputs(self, program: ExportedProgram, variables: dict[str, relax.Var]) -> Any:
        """The user's outputs: one expression, or a tuple of them."""
        nodes, specs = program.graph.nodes, program.graph_signature.output_specs
        values = self._translate_fx_graph(program.graph_module, nodes, variables, set())
        kinds = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
        users = [v for v, s in zip(values, specs, strict=True) if s.kind in kinds]
        users = [value for value in users if value is not None]
        self._raise()
        for value in users:
            if not (isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType)):
                found = f"the model returns {value}, not a tensor"
                self._error("output-not-supported", found, help="return a tensor or None")
        self._raise()
        return users[0] if len(users) == 1 else tuple(users)

    @staticmethod
    def _flatten_output_args(values: Any) -> tuple[Any, ...]:
        """Nested lists and tuples as one tuple; what may be returned is checked later."""
        if not isinstance(values, list | tuple):
            return (values,)
        return tuple(v for value in values for v in Importer._flatten_output_args(value))

    # Arguments

    def _check_signature(self, program: ExportedProgram) -> None:
        for spec in program.graph_signature.output_specs:
            if spec.kind in _MUTATIONS:
                self._error(
                    "buffer-mutation",
                    f"the model writes to `{spec.target}`; a Relax function has no state",
                    help="return the new value from forward, or call model.eval() if it is a "
                    "running statistic, or pass use_cache=False if it is a cache",
                )
        for spec in program.graph_signature.input_specs:
            if not isinstance(spec.arg, TensorArgument | ConstantArgument | TokenArgument):
                self._error(
                    "input-not-supported",
                    f"input `{spec.arg.name}` is a {type(spec.arg).__name__}, not a tensor",
                    help="pass a tensor, or write the value into forward",
                )

    def _read_arguments(self, program: ExportedProgram) -> tuple[dict, dict, dict]:
        """By placeholder name: inputs (var), parameters (var, name, tensor), constants."""
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        inputs, params, constants = {}, {}, {}
        seen: dict[tuple, tuple] = {}
        names = {_identity(t): name for name, t in reversed(program.state_dict.items())}
        for spec in program.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            if isinstance(spec.arg, ConstantArgument):
                self.env[node] = spec.arg.value
            elif not isinstance(spec.arg, TensorArgument):
                val = node.meta.get("val")
                self.env[node] = self.types.dim(val) if isinstance(val, torch.SymInt) else None
            elif spec.kind is InputKind.USER_INPUT:
                inputs[node.name] = relax.Var(node.name, self.types.of(node.meta["val"]))
            elif node.users:
                tensor = _tensor(program, spec)
                name = names.get(_identity(tensor), spec.target)
                entry = (relax.Var(name, self.types.of(tensor)), name, tensor)
                if _is_parameter(spec, tensor):
                    params[node.name] = seen.setdefault(_identity(tensor), entry)
                else:
                    constants[node.name] = (entry[0], tensor)
        self._check_solvable(inputs)
        position = {name: i for i, name in enumerate(program.state_dict)}
        ordered = dict(sorted(params.items(), key=lambda entry: position[entry[1][1]]))
        return inputs, ordered, constants

    def _check_solvable(self, inputs: dict[str, relax.Var]) -> None:
        """Each symbol must be a dimension of an input by itself: 2 s is not solved for s."""
        shapes = {v.name: list(v.ty.shape) for v in inputs.values()}
        plain = {d.name for dims in shapes.values() for d in dims if tvm.ir.is_prim_var(d)}
        for name, dims in shapes.items():
            free = [
                str(d) for d in dims if {v.name for v in tirx.analysis.undefined_vars(d)} - plain
            ]
            if free:
                self._error(
                    "dimension-not-solvable",
                    f"input `{name}` has the dimension {', '.join(free)}, and no input has its "
                    "symbol as a dimension of its own",
                    help="name the dimension itself in dynamic_shapes: Dim('t') for 2 * Dim('s')",
                )

    def _bounds(self, program: ExportedProgram) -> dict[str, dict[str, int]]:
        ranges = {
            str(symbol): (int(r.lower), None if r.upper >= 2**62 else int(r.upper))
            for symbol, r in program.range_constraints.items()
            if isinstance(symbol, sympy.Symbol) and math.isfinite(float(r.lower))
        }
        bounds = {
            "tir_var_lower_bound": {name: low for name, (low, _) in ranges.items()},
            "tir_var_upper_bound": {n: high for n, (_, high) in ranges.items() if high is not None},
        }
        return {name: values for name, values in bounds.items() if values}

    # Nodes

    def _check_unsupported_func_type(self, nodes: list[torch.fx.Node]) -> None:
        """Give each op without a converter one that notes it."""
        for name in {n.target.__name__ for n in nodes if n.op == "call_function"}:
            if name not in self.convert_map:
                self.convert_map[name] = partial(self._convert_node, name, None)

    def _convert_node(self, name: str, convert: Callable | None, node: torch.fx.Node) -> Any:
        val = node.meta.get("val")
        if any(self.env.get(arg) is _FAILED for arg in node.all_input_nodes):
            return self._stand_in(val)
        if isinstance(val, int | torch.SymInt) and name not in _READS_A_VALUE:
            return self.types.dim(val)
        if isinstance(val, torch.SymBool) or name in _GUARDS:
            return None
        if convert is None:
            self.unsupported.setdefault(name, []).append(node)
            return self._stand_in(val)
        call = WatchedCall(node) if node.kwargs else node
        try:
            out = self._match(node, convert(call), val)
        except Exception as error:
            message = str(error).strip().splitlines()
            found = f"{name}: {(message or [repr(error)])[-1]}"
            self._error("op-not-converted", found, node, help=_rewrite(name))
            return self._stand_in(val)
        self._check_keywords(name, node, call)
        return out

    def _check_keywords(self, name: str, node: torch.fx.Node, call: Any) -> None:
        if not node.kwargs:
            return
        schema = getattr(node.target, "_schema", None)
        defaults = {a.name: a.default_value for a in schema.arguments} if schema else {}
        for key in node.kwargs.keys() - call.kwargs.read - _WITHOUT_MEANING:
            if node.kwargs[key] != defaults.get(key):
                found = f"{name}: the importer ignores {key}={node.kwargs[key]!r}"
                self._error("keyword-ignored", found, node, help=_rewrite(name))

    def _match(self, node: torch.fx.Node, out: Any, val: Any) -> Any:
        """`out` with torch's type; an error where the two cannot both be right."""
        is_tensor = isinstance(out, relax.Expr) and isinstance(out.ty, relax.TensorType)
        if isinstance(val, torch.SymInt) and tvm.ir.is_prim_var(out):
            self.types.symbols[str(val.node.expr)] = out
        if not is_tensor or not isinstance(val, torch.Tensor):
            return out
        want = self.types.of(val)
        have = out.ty.shape
        if out.ty.dtype != want.dtype or shapes_differ(have, want.shape):
            name = node.target.__name__
            found = f"{name}: imported as {out.ty}, torch says {want}"
            self._error("op-type", found, node, help=_rewrite(name))
            return self._stand_in(val)
        if isinstance(have, relax.ShapeExpr) and same_shape(have, want.shape):
            return out
        return self.block_builder.match_cast(out, want)

    def _stand_in(self, val: Any) -> Any:
        """Something of the right type, to go on with after an error."""
        if isinstance(val, torch.Tensor):
            try:
                ty = self.types.of(val)
            except NotImplementedError:
                return _FAILED
            return self.block_builder.emit(relax.op.zeros(ty.shape, str(ty.dtype)))
        if isinstance(val, tuple | list):
            return tuple(self._stand_in(v) for v in val)
        return self.types.dim(val) if isinstance(val, int | torch.SymInt) else _FAILED

    # Errors

    def _error(
        self, code: str, message: str, node: torch.fx.Node | None = None, *, help: str
    ) -> None:
        where = {"function": "main"}
        if node is not None:
            where |= {"binding": node.name, "ir": source_line(node)}
        self.errors.append(Diagnostic.error(code, message, help=help, **where))

    def _raise(self) -> None:
        ops = [self._unsupported(name, nodes) for name, nodes in self.unsupported.items()]
        raise_errors(ops + self.errors)

    def _unsupported(self, name: str, nodes: list[torch.fx.Node]) -> Diagnostic:
        lines = list(dict.fromkeys(source_line(node) for node in nodes))
        return Diagnostic.error(
            "op-not-supported",
            f"{name}: no converter, {len(nodes)} call{'s' * (len(nodes) > 1)}",
            function="main",
            binding=nodes[0].name,
            ir="\n".join(lines),
            help=_rewrite(name),
        )


def _with_importer(convert: Callable, importer: Importer, node: torch.fx.Node) -> Any:
    return convert(node, importer)


def _tensor(program: ExportedProgram, spec: Any) -> torch.Tensor:
    if spec.kind is InputKind.PARAMETER or spec.persistent:
        return program.state_dict[spec.target]
    return program.constants[spec.target]


def _is_parameter(spec: Any, tensor: torch.Tensor) -> bool:
    return spec.kind is InputKind.PARAMETER or (
        bool(spec.persistent) and tensor.numel() * tensor.element_size() > _LARGE_BUFFER
    )


def _identity(tensor: torch.Tensor) -> tuple:
    """Equal for tied weights."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
