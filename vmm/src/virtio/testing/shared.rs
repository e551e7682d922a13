//! A device that its event loop and a test both call.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use thaw_protocol::control::Backend;
use thaw_protocol::device_limits::DeviceLimits;

use crate::virtio::config::ConfigSpace;
use crate::virtio::device::{Activation, AttachError, Call, DeviceError, DeviceSpec, Saved, VirtioDevice};
use crate::virtio::state::{DeviceState, QueueRecord};

/// A device that an event loop serves while a [`super::Rig`] drives it: queues are kicked through their eventfds.
pub struct Shared<D> {
    pub device: Arc<Mutex<D>>,
}

impl<D: VirtioDevice> Shared<D> {
    pub fn new(device: D) -> Shared<D> {
        Shared {
            device: Arc::new(Mutex::new(device)),
        }
    }
}

impl<D: VirtioDevice> VirtioDevice for Shared<D> {
    fn spec(&self) -> DeviceSpec {
        self.device.lock().unwrap().spec()
    }
    fn config(&self) -> Arc<ConfigSpace> {
        self.device.lock().unwrap().config()
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.device.lock().unwrap().activate(activation)
    }
    fn reset(&mut self) {
        self.device.lock().unwrap().reset();
    }
    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        self.device.lock().unwrap().attach(backend, fds)
    }
    fn is_backed(&self) -> bool {
        self.device.lock().unwrap().is_backed()
    }
    fn save(&mut self) -> Saved {
        self.device.lock().unwrap().save()
    }
    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        self.device.lock().unwrap().check(state, queues)
    }
    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        self.device.lock().unwrap().restore(activation, state)
    }
    fn limit(&mut self, limits: DeviceLimits) -> Result<(), AttachError> {
        self.device.lock().unwrap().limit(limits)
    }
    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        self.device.lock().unwrap().queue_ready(queue)
    }
    fn woken(&mut self) -> Result<(), DeviceError> {
        self.device.lock().unwrap().woken()
    }
    fn next_call(&mut self) -> Result<Option<Box<dyn Call>>, DeviceError> {
        self.device.lock().unwrap().next_call()
    }
    fn calls_ended(&mut self) -> Result<(), DeviceError> {
        self.device.lock().unwrap().calls_ended()
    }
}
