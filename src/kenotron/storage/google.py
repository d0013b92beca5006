"""gcsfs without its retries, with Google's JSON API.

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
    """A file system that tries once. (gcsfs's default class queries the kind of a bucket by gRPC at every call.)"""

    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await GCSFileSystem._request.__wrapped__(self, *args, **kwargs)
        except (OSError, HttpError) as error:
            words = " ".join(str(error).split())
            expired = "Invalid Credentials" in words  # the next try refreshes them
            if words.startswith("Forbidden") or (getattr(error, "code", None) == 401 and not expired):
                raise PermissionError(words) from None
            raise
