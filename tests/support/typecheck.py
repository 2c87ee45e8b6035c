"""The type checker that the tests run the project under: an int will do for a float."""

from beartype import BeartypeConf, beartype

check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))
