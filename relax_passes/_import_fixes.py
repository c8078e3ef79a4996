"""The passes that make a module as importers leave it right, in order. Importers run them, and a
build does after `InlinePrivateFunctions`."""

from tvm.ir.transform import Pass

from relax_passes.normalize_negative_indices import NormalizeNegativeIndices
from relax_passes.simplify_symbolic_shapes import SimplifySymbolicShapes
from relax_passes.widen_cumsum import WidenCumsum

IMPORT_FIXES: tuple[Pass, ...] = (
    WidenCumsum(),
    NormalizeNegativeIndices(),
    SimplifySymbolicShapes(),
)
