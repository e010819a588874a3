"""Every method over its range at equal bytes: what predictions lose against what is saved."""
