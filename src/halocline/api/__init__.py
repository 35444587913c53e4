"""WHAT A CLIENT SEES: OpenAI's HTTP API over whatever front end it is given; it knows no engine, model or scheduler."""
