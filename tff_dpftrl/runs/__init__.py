"""What every private run needs, whatever it trains: privacy plan, committed rounds, files."""
