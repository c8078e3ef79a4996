"""Front ends: models of PyTorch and ONNX as Relax modules, parameters beside them."""
