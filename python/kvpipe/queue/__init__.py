"""Requests through a RabbitMQ broker: front ends publish them, workers beside decode instances consume them."""
