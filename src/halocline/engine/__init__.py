"""WHAT TURNS THE CRANK: the step loop, the process boundary, figures and metrics."""
