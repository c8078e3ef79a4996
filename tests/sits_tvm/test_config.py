"""Config and QuantSpec refuse what they cannot do, and say what they can."""

import pytest

from relax_passes.prune_rules import block
from sits_tvm import Config, QuantSpec
from sits_tvm.config import ATTENTION_RULES, GRAPH_RULES


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 5),
        ("group_size", 48),
        ("group_size", 32.0),
        ("symmetric", 1),
        ("scale_dtype", "bfloat16"),
        ("scale_method", "gptq"),
        ("activation", "int2"),
        ("activation_scale", "mse"),
    ],
)
def test_quant_spec_names_field_and_value(field, value):
    with pytest.raises(ValueError, match=f"QuantSpec.{field}={value!r} is not supported; it takes"):
        QuantSpec(**{field: value})


def test_scales_of_activations_need_activations_that_are_quantized():
    with pytest.raises(ValueError, match=r"QuantSpec\.activation_scale='power-of-two' is of act.*"):
        QuantSpec(activation="bfloat16", activation_scale="power-of-two")


def test_quant_spec_reads_as_people_say_it():
    assert str(QuantSpec()) == "int4 g128 symmetric, float16 scales"
    spec = QuantSpec(group_size=-1, symmetric=False, scale_method="mse")
    assert str(spec) == "int4 per channel asymmetric, float16 scales, mse"
    spec = QuantSpec(activation="int4", activation_scale="power-of-two")
    assert str(spec).endswith(", int4 activations with power-of-two scales")
    assert str(QuantSpec(bits=3)) == "int3 g128 symmetric, float16 scales"


def test_quant_takes_a_spec():
    with pytest.raises(TypeError, match=r"Config\.quant='int4'.*QuantSpec\(group_size=32\)"):
        Config(quant="int4")


def test_skip_takes_a_tuple():
    with pytest.raises(TypeError, match=r"Config\.skip='\*\.layers\.0\.\*'"):
        Config(skip="*.layers.0.*")


@pytest.mark.parametrize(
    ("field", "value"), [("skip", None), ("skip", [1]), ("dump_dir", 3), ("database", True)]
)
def test_wrong_types_name_the_field(field, value):
    with pytest.raises(TypeError, match=f"Config.{field}="):
        Config(**{field: value})


@pytest.mark.parametrize("field", ["quantize_embedding", "quantize_head"])
def test_head_and_embedding_need_quant(field):
    with pytest.raises(ValueError, match=r"need Config\.quant"):
        Config(**{field: True})


@pytest.mark.parametrize("field", ["attention", "gradient_gate", "verify"])
def test_no_field_is_taken_without_effect(field):
    with pytest.raises(ValueError, match=f"Config.{field}='something' is not supported"):
        Config(**{field: "something"})


def test_attention_takes_rules():
    assert Config().attention_rules == frozenset(ATTENTION_RULES)
    assert Config(attention="off").attention_rules == frozenset()
    assert all(f'"{rule}"' in Config.__doc__ for rule in ATTENTION_RULES)
    for names in ({"views"}, ["views"], ("views",), frozenset({"views"})):
        assert Config(attention=names).attention_rules == {"views"}
        assert Config(attention=names) == Config(attention=frozenset({"views"}))


@pytest.mark.parametrize("value", ["views", ["view"], {"views", "all"}, None, 3])
def test_attention_names_the_rules_there_are(value):
    with pytest.raises(ValueError, match="a set of rules: views, common-subexpressions, "):
        Config(attention=value)


def test_rules_are_those_of_the_passes():
    assert set(GRAPH_RULES) == {block.SHARED, *(rule.name for rule in block.RULES)}


def test_from_dict_reads_nested_fields():
    values = {"quant": {"group_size": 32, "symmetric": False}, "skip": ["lm_head*"]}
    expected = Config(quant=QuantSpec(group_size=32, symmetric=False), skip=("lm_head*",))
    assert Config.from_dict(values) == expected


@pytest.mark.parametrize("values", [{"qaunt": {}}, {"quant": {"groups": 32}}, ["quant"]])
def test_from_dict_refuses_unknown_fields(values):
    with pytest.raises(ValueError, match="fields"):
        Config.from_dict(values)
