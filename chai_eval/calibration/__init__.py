"""The offline phase, once per model: what heads attend to, how many clusters each layer keeps, which heads they are."""
