"""Where `halocline replay` and the clients of `halocline bench` are put together: the simulator behind one door.

The heavy parts are imported when they are used: the command line's --help must not wait for them.
"""

from __future__ import annotations

from halocline.sim.client import Answer, LoadError, ask, first_model, open_client
from halocline.sim.scrape import read_figures

__all__ = ["Answer", "LoadError", "ask", "first_model", "open_client", "read_figures"]
