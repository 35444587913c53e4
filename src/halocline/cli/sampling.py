"""The sampling flags that `generate` and `chat` share."""

from __future__ import annotations

from typing import Annotated

import typer

MaxTokens = Annotated[int | None, typer.Option(help="most tokens of the answer (default: as many as fit)", min=1)]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token; above, randomness grows", min=0)]
TopP = Annotated[float, typer.Option(help="keep the smallest set of tokens that reaches this probability")]
TopK = Annotated[int, typer.Option(help="keep the k most probable tokens; 0 keeps all")]
Stop = Annotated[list[str] | None, typer.Option(help="text that ends the answer; may be given several times")]
