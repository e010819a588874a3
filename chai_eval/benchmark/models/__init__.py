"""Which model types methods can be put into: each built small, and compared with the stock model; not a measurement."""
