//! Tables on stdout. Columns are as wide as their widest entry. On a terminal that is too narrow for columns, each row is a block of lines.

use std::io::IsTerminal;

use super::print;
use crate::stdio::terminal;

/// A table that does not fit is shown as blocks on terminals narrower than this. Wider ones wrap its lines.
const COLUMNS_FIT: usize = 60;

/// Headings and rows.
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(head: &[&str]) -> Table {
        Table {
            rows: vec![head.iter().map(|it| (*it).to_owned()).collect()],
        }
    }

    pub(super) fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    /// The lines, for a terminal of this many columns or for no terminal.
    pub(super) fn lines(&self, terminal: Option<usize>) -> Vec<String> {
        let lines = self.columns();
        let widest = lines.iter().map(|line| line.chars().count()).max();
        // Without rows there are no blocks: then the headings are shown.
        let has_rows = self.rows.len() > 1;
        match terminal {
            Some(columns) if has_rows && columns < COLUMNS_FIT && widest > Some(columns) => self.blocks(),
            _ => lines,
        }
    }

    fn columns(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            cells.join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }

    /// A line for each cell with its heading, and an empty line between rows.
    fn blocks(&self) -> Vec<String> {
        let Some((head, rows)) = self.rows.split_first() else {
            return Vec::new();
        };
        let blocks = rows.iter().map(|row| {
            let cells = head.iter().zip(row);
            let lines: Vec<String> = cells.map(|(name, cell)| format!("{name} {cell}")).collect();
            lines
        });
        let blocks: Vec<Vec<String>> = blocks.collect();
        blocks.join(&String::new())
    }

    pub(super) fn print(&self) {
        let is_terminal = std::io::stdout().is_terminal();
        let size = is_terminal.then(terminal::size).flatten();
        let lines = self.lines(size.map(|(_, columns)| usize::from(columns)));
        lines.iter().for_each(|line| print(line));
    }
}

/// Text from elsewhere, without what a terminal would act on.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_text() {
        let mut table = Table::new(&["A", "B"]);
        table.row(["long one".into(), "x".into()]);
        table.row(["s".into(), String::new()]);
        assert_eq!(table.lines(None), ["A         B", "long one  x", "s"]);
        assert_eq!(table.lines(Some(20)), table.lines(None));
    }

    #[test]
    fn a_narrow_terminal_gets_a_block_for_each_row() {
        let mut table = Table::new(&["ID", "IMAGE"]);
        table.row(["0123456789ab".into(), "registry/image".into()]);
        table.row(["c".into(), "d".into()]);
        let blocks = ["ID 0123456789ab", "IMAGE registry/image", "", "ID c", "IMAGE d"];
        assert_eq!(table.lines(Some(20)), blocks);
        assert_eq!(table.lines(Some(60)).len(), 3);
    }

    #[test]
    fn a_table_without_rows_shows_its_headings() {
        let table = Table::new(&["ID", "NAME", "IMAGE", "COMMAND"]);
        for terminal in [None, Some(8), Some(80)] {
            assert_eq!(table.lines(terminal), ["ID  NAME  IMAGE  COMMAND"]);
        }
    }
}
