"""Imported before ``init_process_group`` by ranks whose exit code somebody looks at.

torch makes its optimizers import ``torch._dynamo``, and with it functions whose default argument is the process group
of that moment. It then survives ``destroy_process_group``, and now and then one of gloo's threads finds the interpreter
gone: "terminate called without an active exception" (seen on torch 2.13; pytorch/pytorch#179291).
"""

import torch._dynamo  # noqa: F401
