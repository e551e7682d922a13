//! Where asynchronous code runs: one thread, so that a run can be repeated.

use std::cell::RefCell;

use tokio::runtime::{Builder, Runtime};

thread_local!(static RUNTIME: RefCell<Runtime> = RefCell::new(runtime()));

fn runtime() -> Runtime {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime of one thread")
}

/// Runs it to its end, and what it has started until then.
pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    RUNTIME.with_borrow(|runtime| runtime.block_on(work))
}
