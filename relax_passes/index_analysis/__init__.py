"""What a tensor holds at an index: views as index maps, masks as bounds, both proved."""
