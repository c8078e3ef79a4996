"""CUDA text, as TVM emits it, as C++ for the host: see cuda_host.h.

`asm` becomes calls of functions in cuda_host_ptx.h, a pointer becomes a `Ptr`, which checks what it
is used for. Lines stay where they are. What is not known here raises NotImplementedError.
"""

import re

_ELEMENTS = {
    **{f"b{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
}
_PAIRS = {"f16": "half", "bf16": "nv_bfloat16"}


def _integers(kind):
    return f"ptx::Integers<{kind[1]}, {str(kind[0] == 's').lower()}>"


# An instruction, and the function that it is
_INSTRUCTIONS = {
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.\1\.f32": lambda m: (
        f"mma<ptx::Pairs<{_PAIRS[m[1]]}>, ptx::Pairs<{_PAIRS[m[1]]}>>"
    ),
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.([su]8)\.([su]8)\.s32": lambda m: (
        f"mma<{_integers(m[1])}, {_integers(m[2])}>"
    ),
    r"mma\.sync\.aligned\.m16n8k64\.row\.col\.s32\.([su]4)\.([su]4)\.s32": lambda m: (
        f"mma<{_integers(m[1])}, {_integers(m[2])}>"
    ),
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16": lambda m: (
        f"ldmatrix<{m[1]}, {str(m[2] is not None).lower()}>"
    ),
    r"cp\.async\.(ca|cg)\.shared\.global(?:\.L2::\d+B)?": lambda m: f"cp_async_{m[1]}",
    r"cp\.async\.(commit_group|wait_group|wait_all)": lambda m: f"cp_async_{m[1]}",
    r"(ld|st)\.(?P<space>global|shared)(?:\.nc)?(?:\.L\d::\w+)*(?:\.v([24]))?\.([bsuf]\d+)": (
        lambda m: f"{m[1]}<{_ELEMENTS[m[4]]}, {m[3] or 1}>"
    ),
    r"cvt\.rn\.(b?f16)x2\.f32": lambda m: f"cvt_pair<{_PAIRS[m[1]]}>",
    r"(add|sub|mul|fma)(?:\.rn)?\.(b?f16)x2": lambda m: f"{m[1]}<{_PAIRS[m[2]]}>",
    r"(lop3|prmt|mov)\.b32": lambda m: m[1],
    r"prmt\.b32\.rc8": lambda m: "prmt_rc8",
    r"fence\.proxy\.async\.shared::cta": lambda m: "fence_proxy_async",
    r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned": lambda m: f"wgmma_{m[1]}",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2": lambda m: (
        f"wgmma_floats<ptx::Pairs<{_PAIRS[m[2]]}>, ptx::Pairs<{_PAIRS[m[2]]}>, {m[1]}>"
    ),
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.s32\.([su]8)\.([su]8)": lambda m: (
        f"wgmma_integers<{_integers(m[2])}, {_integers(m[3])}, {m[1]}>"
    ),
    r"ex2\.approx(?:\.ftz)?\.f32": lambda m: "ex2",
    r"rcp\.approx\.ftz\.f32": lambda m: "rcp",
    r"dp4a\.s32\.s32": lambda m: "dp4a",
    r"fma\.rn\.f32": lambda m: "fma_f32",
    r"activemask\.b32": lambda m: "activemask",
    r"bar\.warp\.sync": lambda m: "bar_warp_sync",
}
_GUARDED = re.compile(r"\{ \.reg \.pred p; setp\.ne\.b32 p, (%\d+), 0; @p ([^;]*); \}")
"""How TVM spells an instruction that only some threads execute."""

_PREDICATED = re.compile(
    r"\{ \.reg \.pred (\w+); setp\.ne\.b32 \1, (%\d+), 0; (wgmma[^;]*), \1(,[^;]*)?; \}"
)
"""And how one with a predicate as an operand."""


def translate(text):
    """The whole text, to be compiled after cuda_host.h."""
    text = re.sub(r"#include <(cuda\w*|math_constants|mma)\.h>", "", text)
    text = re.sub(r"/\*.*?\*/", "", text)
    text = _replace_asm(text)
    text = re.sub(r"__forceinline__ __device__ [^;{]*\{", _with_line, text)
    kind = r"(?:const |volatile )*((?:unsigned |signed )?\w+)"
    text = re.sub(rf"(?<=\(){kind} ?\*(?=\))", r"Ptr<\1>", text)  # a cast
    place = r"(^|[(,;{])(\s*)"  # of a parameter or a variable
    text = re.sub(rf"{place}{kind}\*(?: __restrict__)?(?= \w)", r"\1\2Ptr<\3>", text, flags=re.M)
    text = _replace_shared(text)
    return re.sub(r"alignas\(\d+\) [\w ]+ (\w+)\[\d+\];", r"\g<0> host::poison(\1);", text)


def kernels(text):
    """Of each kernel by name, its parameters as (type, name); "half*" is a tensor of half."""
    found = {}
    pattern = r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\) \{'
    for name, parameters in re.findall(pattern, text):
        plain = re.sub(r"__restrict__|\bconst\b", "", parameters)
        pairs = [one.strip().rpartition(" ") for one in plain.split(",") if one.strip()]
        found[name] = [(kind.strip(), parameter) for kind, _, parameter in pairs]
    return found


def _with_line(match):
    """A function of the text notes which line called it."""
    head = match[0].rstrip("{ ").removesuffix(")")
    comma = "" if head.endswith("(") else ", "
    return f"{head}{comma}int line_ = __builtin_LINE()) {{ host::current->line = line_;"


def _replace_shared(text):
    pattern = r"extern __shared__ (?:__align__|alignas)\(\d+\) ([\w ]+) (\w+)\[\];"
    text = re.sub(pattern, r"auto \2 = host::dynamic_shared<\1>();", text)
    pattern = r"__shared__ (?:__align__|alignas)\(\d+\) ([\w ]+) (\w+)\[(\d+)\];"
    text = re.sub(pattern, r"auto \2 = host::static_shared<\1>(__COUNTER__, \3);", text)
    if "__shared__" in text:
        raise NotImplementedError("a declaration of shared memory")
    return text


def _replace_asm(text):
    pieces, rest = [], 0
    for match in re.finditer(r"\b(?:__)?asm(?:__)?(?:\s+(?:__)?volatile(?:__)?)?\s*\(", text):
        stop = _closing(text, match.end())
        lines = "\n" * text.count("\n", match.start(), stop)
        pieces += [text[rest : match.start()], _calls(text[match.end() : stop]), lines]
        rest = stop + 1
    return "".join([*pieces, text[rest:]])


def _closing(text, start):
    """Where the parenthesis that is open at `start` closes."""
    depth = 1
    for match in re.compile(r'"(?:\\.|[^"\\])*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise ValueError("asm: a parenthesis is not closed")


def _calls(statement):
    """What is in the parentheses of asm: a template, then outputs and inputs behind colons."""
    template, *sections = re.split(r':(?=(?:[^"]*"[^"]*")*[^"]*$)', statement)
    code = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', template))
    code = re.sub(r"\\[nt]", " ", code)
    values = [value for section in sections[:2] for value in _operands(section)]
    guarded = _GUARDED.fullmatch(code.strip())
    if guarded:
        condition = values[int(guarded[1].removeprefix("%"))]
        return f"(({condition}) ? (void)({_call(guarded[2], values)}) : (void)0)"
    code = _PREDICATED.sub(r"\3, \2\4;", code.strip())
    instructions = [one.strip() for one in code.split(";") if one.strip()]
    return ", ".join(_call(one, values) for one in instructions)


def _operands(section):
    """The expressions in `"r"(x), "l"(p + (1))`."""
    found, at = [], 0
    while match := re.compile(r'[\s,]*"[=+&]*[a-z]"\s*\(').match(section, at):
        at = _closing(section, match.end())
        found.append(section[match.end() : at])
        at += 1
    return found


def _call(instruction, values):
    """Addresses come first, then the other operands as in PTX."""
    mnemonic, _, operands = instruction.partition(" ")
    matches = {re.fullmatch(pattern, mnemonic): to for pattern, to in _INSTRUCTIONS.items()}
    match = next(filter(None, matches), None)
    inside = re.findall(r"\[([^\]]*)\]", operands)
    others = re.findall(r"[^\s,{}]+", re.sub(r"\[[^\]]*\]", "", operands))
    known = all(re.fullmatch(r"%\d+|-?\d+|0[xX][0-9a-fA-F]+", one) for one in others)
    if match is None or not known or not all(re.fullmatch(r"%\d+( ?\+ ?\d+)?", x) for x in inside):
        raise NotImplementedError(f"PTX: {instruction}")
    if "space" in match.groupdict():
        inside = [f"ptx::{match['space']}({address})" for address in inside]
    arguments = ", ".join([*inside, *others])
    arguments = re.sub(r"%(\d+)", lambda number: f"({values[int(number[1])]})", arguments)
    return f"ptx::{matches[match](match)}({arguments})"
