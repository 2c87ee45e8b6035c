"""The keys of a config: a frozen dataclass for each section, which says all there is to a key."""
