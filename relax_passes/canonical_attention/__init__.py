"""How `CanonicalizeAttention` finds attention: outwards from a softmax, decided at the end."""
