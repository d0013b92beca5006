"""Pass the error of a rank to the launcher in a JSON file, in the form of torch's own records."""

import json
import os
import time
import traceback
from pathlib import Path

from kenotron.config.errors import FOR_USERS, InputError
from kenotron.parallel.ranks import describe
from kenotron.storage.files import replace_file

ENDED_BY_ANOTHER = 75  # exit code of a rank that ended because another rank failed


def record(error: Exception) -> int:
    """Write the record of `error` to the launcher's file, and return the exit code.

    torchrun shows the call stack of a record but not its message, so for wrong input the stack is the message.
    """
    code, for_users = 2 if isinstance(error, InputError) else 1, isinstance(error, FOR_USERS)
    stack = "" if for_users else "".join(traceback.format_exception(error))
    stack = f"error: {error}" if code == 2 else stack
    details = {"py_callstack": stack, "timestamp": str(int(time.time())), "for_users": for_users}
    content = {"message": {"message": describe(error), "errorCode": code, "extraInfo": details}}
    replace_file(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), json.dumps(content).encode(), durable=False)
    return code
