"""The passes that make an imported module right, in order. Every build runs them first."""

IMPORT_FIXES: tuple = ()
