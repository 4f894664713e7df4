"""The engine: it owns every copy of state, data, orders and devices. It knows no method."""
