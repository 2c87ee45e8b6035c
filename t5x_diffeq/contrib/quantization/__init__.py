"""The loss of a trained run with rounded weights: are W(t) as robust as layers? See README.md."""
