"""Wrong inputs over the whole interface: wrong_inputs.txt has the first line of each error."""

import re
from pathlib import Path

import pytest
import wrong_inputs

import sits_tvm
from relax_passes import op

_LINES = Path(wrong_inputs.__file__).with_suffix(".txt").read_text().splitlines()
_TABLE = [line for line in _LINES if line and not line.startswith("#")]
TABLE = list(zip(_TABLE[::2], _TABLE[1::2], strict=True))
ERRORS = (ValueError, TypeError, KeyError, OSError, RuntimeError)


@pytest.mark.parametrize(("call", "line"), TABLE, ids=[call for call, _ in TABLE])
def test_says_what_was_found(call, line, tmp_path, monkeypatch):
    for name in ("TVM_TRACKER_HOST", "TVM_TRACKER_PORT", "TVM_TRACKER_KEY"):
        monkeypatch.delenv(name, raising=False)
    names = {**vars(sits_tvm), **vars(wrong_inputs), "op": op, "tmp": tmp_path}
    with pytest.raises(ERRORS) as raised:
        eval(call, names)
    text = str(raised.value).replace(str(tmp_path), "tmp")
    assert re.sub(r"of \d+ bytes", "of N bytes", text.splitlines()[0]) == line.strip()
    if text.startswith("error["):
        assert "\nhelp: " in text  # what to write instead


def test_the_table_is_long():
    assert len(TABLE) >= 100
