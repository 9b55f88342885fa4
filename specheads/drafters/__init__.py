"""Everything that proposes tokens, one file each, behind one contract."""
