"""Documents, weights and text that a run needs: fetched, checked, unpacked once, or the user's own."""
