"""The round engine: decides what is committed when; pure, with a simulator."""
