"""Published coding agents under one agent id each: turns, side requests, kills, rewinds, forks."""
