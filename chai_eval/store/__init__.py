"""Results on disk: the key that names one, the journal while it is scored, the record when it is finished."""
