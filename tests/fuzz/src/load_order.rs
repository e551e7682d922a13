//! A converted image's load order: what is accepted is encoded and read again as the same, and its runs have a sum.

use thaw_images::load_order::LoadOrder;

pub fn run(document: &[u8]) {
    let Ok(order) = LoadOrder::from_json(document) else { return };
    for run in &order.runs {
        assert!(order.blob(run).is_some_and(|blob| run.offset + run.length <= blob.length));
    }
    let _ = order.bytes();
    let encoded = order.to_json().expect("an order that was read is sound");
    assert_eq!(LoadOrder::from_json(&encoded).as_ref().ok(), Some(&order));
}
