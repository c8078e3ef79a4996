"""The passes that make a module as importers leave it right, in order. Importers run them, and a
build does after `InlinePrivateFunctions`."""

from tvm.ir.transform import Pass

from .normalize_negative_indices import NormalizeNegativeIndices
from .simplify_symbolic_shapes import SimplifySymbolicShapes
from .widen_cumsum import WidenCumsum

IMPORT_FIXES: tuple[Pass, ...] = (
    WidenCumsum(),
    NormalizeNegativeIndices(),
    SimplifySymbolicShapes(),
)
