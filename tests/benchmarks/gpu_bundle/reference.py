"""Random operands of a case, and its product in float64."""

import torch


def unpacked(parts, case):
    """Codes minus zero points (n, groups, group size), and scales (n, groups), in float64."""
    unit = case["unit"]
    codes = _from_words(parts["codes"], unit["code"])[: case["n"], : case["padded_k"]]
    lane = torch.tensor(unit["lane"], device=codes.device)
    _, groups, _ = parts["scale"].shape
    scale = parts["scale"].to(torch.float64)[:, :, lane].transpose(1, 2).reshape(-1, groups)
    zero = torch.tensor(8.0, dtype=torch.float64, device=codes.device)
    if "zero_point" in parts:
        zeros = _from_words(parts["zero_point"], unit["zero"])
        zero = zeros[: case["n"], : case["groups"], None].to(torch.float64)
    level = codes.reshape(case["n"], case["groups"], -1).to(torch.float64) - zero
    return level, scale[: case["n"]]


def _from_words(words, place):
    """Nibbles of words (tiles, units, words), each row and column of a unit in its place."""
    tiles, units, _ = words.shape
    index = torch.tensor(place, device=words.device)
    shifts = 4 * torch.arange(8, device=words.device)
    nibbles = (words.to(torch.int64)[..., None] >> shifts & 15).to(torch.uint8)
    found = nibbles.reshape(tiles, units, -1)[..., index]
    return found.transpose(1, 2).reshape(tiles * index.shape[0], units * index.shape[1])


def drawn(case, device, generator):
    """Random parts: every code, and scales that keep results near 1."""
    parts = {}
    for name, shape in case["shapes"].items():
        if name == "scale":
            size = torch.rand(shape, generator=generator, device=device) + 0.5
            parts[name] = (size / (4 * case["k"] ** 0.5)).to(torch.float16)
        else:
            span = (-(2**31), 2**31)
            parts[name] = torch.randint(*span, shape, generator=generator, device=device).to(
                torch.int32
            )
    return parts


def activations(case, rows, columns, device, generator):
    """Arguments by name, and X in float64 (rows, groups, group size) with its scales."""
    dtype = getattr(torch, case["dtype"])
    if case["activation"] is None:
        x = torch.randn((rows, case["k"]), generator=generator, device=device).to(dtype)
        filled = torch.zeros((rows, case["padded_k"]), dtype=torch.float64, device=device)
        filled[:, : case["k"]] = x
        return {"X_rows": x}, filled.reshape(rows, case["groups"], -1), None
    codes = torch.randint(-127, 128, (rows, case["padded_k"]), generator=generator, device=device)
    codes[:, case["k"] :] = 0
    order = torch.tensor(columns, device=device)
    words = codes.reshape(rows, -1, 8)[..., order].to(torch.int8).contiguous().view(torch.int32)
    scale = torch.rand((rows, case["scales_of_a_row"]), generator=generator, device=device) / 64
    grouped = codes.reshape(rows, case["groups"], -1)
    sums = grouped.sum(-1).to(torch.int32)
    arguments = {"X_rows": words, "X_scale_rows": scale, "X_sums_rows": sums}
    return arguments, grouped.to(torch.float64), scale.to(torch.float64)


def expected(case, level, scale, x, x_scale):
    """The product and its sum of magnitudes, in float64."""
    if x_scale is not None:
        x = x * x_scale.repeat_interleave(case["groups"] // x_scale.shape[1], dim=1)[..., None]
    weight = (level * scale[..., None]).flatten(1)
    x = x.flatten(1)
    return x @ weight.T, x.abs() @ weight.abs().T
