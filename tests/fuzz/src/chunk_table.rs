//! A converted image's chunk table: what is accepted is encoded to the same bytes, and its spans fit its lengths.

use thaw_images::accelerated::Table;

pub fn run(document: &[u8]) {
    let Ok(table) = Table::decode("fuzz", document) else { return };
    assert_eq!(table.encode(), document);
    let content = table.content("fuzz").expect("a checked table has sound spans");
    assert_eq!(content.spans.stream_length(), content.data_length);
}
