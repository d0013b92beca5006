"""gcsfs without its retries, over Google's JSON API.

Only this file uses private names of gcsfs: `GCSFileSystem._request`, and the function that its retry decorator wraps.
"""

from typing import Any

import gcsfs
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError

from kenotron.config.errors import InputError

if not hasattr(GCSFileSystem._request, "__wrapped__"):
    raise InputError(
        f"gs://: gcsfs {gcsfs.__version__} has no GCSFileSystem._request.__wrapped__, by which its retries are turned "
        "off; expected a version such as 2026.10.1"
    )


class GoogleFileSystem(GCSFileSystem):
    """Tries once. (gcsfs's default class asks by gRPC, at every call, for the kind of a bucket.)"""

    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await GCSFileSystem._request.__wrapped__(self, *args, **kwargs)
        except (OSError, HttpError) as error:
            words = " ".join(str(error).split())
            expired = "Invalid Credentials" in words  # which the next try refreshes
            if words.startswith("Forbidden") or (getattr(error, "code", None) == 401 and not expired):
                raise PermissionError(words) from None
            raise
