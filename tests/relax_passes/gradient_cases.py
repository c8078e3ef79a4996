"""Ops and their torch equivalents, with inputs at which their gradients are compared."""

import gradient_cases_elementwise
import gradient_cases_layers
import gradient_cases_shapes

CASES = {
    **gradient_cases_elementwise.CASES,
    **gradient_cases_shapes.CASES,
    **gradient_cases_layers.CASES,
}
