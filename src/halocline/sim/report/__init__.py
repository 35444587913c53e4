"""What is shown of a replay: its figures by name, the terminal's table, the JSON record, the page with plots."""
