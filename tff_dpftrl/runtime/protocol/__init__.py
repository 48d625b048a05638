"""The protocol between devices and server: messages, attestation and pace steering."""
