"""One policy a file; each module exposes `POLICY`."""
