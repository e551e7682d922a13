//! One microVM: memory, buses, virtio devices, boot, jail.
