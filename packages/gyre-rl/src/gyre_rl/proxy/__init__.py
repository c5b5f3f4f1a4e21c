"""The recording proxy's process: gyre-tito in front, the cells' engines behind, routed by the scheduler."""
