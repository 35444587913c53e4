"""Where `halocline replay` and the clients of `halocline bench` are put together: the simulator behind one door.

The heavy parts are imported when they are used: the command line's --help must not wait for them.
"""

from __future__ import annotations

from halocline.sim.client import Answer, LoadError, ask, base_of, first_model, open_client

__all__ = ["Answer", "LoadError", "ask", "base_of", "first_model", "open_client"]
