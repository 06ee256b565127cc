"""What reading JSON may raise: it comes from users, clients and engines."""

from typing import Final

import msgspec

NO_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""It is none, has other fields or bytes than it should, or is nested too deeply."""
