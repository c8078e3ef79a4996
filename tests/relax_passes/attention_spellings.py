"""All spellings of attention, by table; see `attention_meaning.Spelling`."""

from attention_spellings_biased import BIASED
from attention_spellings_causal import CAUSAL
from attention_spellings_grouped import GROUPED
from attention_spellings_layout import LAYOUT
from attention_spellings_masked import MASKED
from attention_spellings_masks import MASKS
from attention_spellings_plain import PLAIN
from attention_spellings_scores import SCORES
from attention_spellings_softmax import SOFTMAX

TABLES = {
    "plain": PLAIN,
    "masked": MASKED,
    "biased": BIASED,
    "grouped": GROUPED,
    "layout": LAYOUT,
    "scores": SCORES,
    "softmax": SOFTMAX,
    "masks": MASKS,
    "causal": CAUSAL,
}
SPELLINGS = [spelling for table in TABLES.values() for spelling in table]
