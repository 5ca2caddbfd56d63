# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The command line, `hf-saguaro`."""
