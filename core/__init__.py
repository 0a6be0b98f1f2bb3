"""Values that every part of Baton shares. No torch, no ray, no grpc."""
