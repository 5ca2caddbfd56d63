# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The one error a user can cause."""


class SaguaroError(ValueError):
    """A request that cannot be honoured, raised before any token is made.

    The message says what was given, why it cannot work and what to do instead.
    """
