"""Imported first, by the campaign's own process and by stand-ins: neither needs megatron-core."""

from light_import import import_lightly

import_lightly()
