//! Tests the roles of callers over TCP, by their tokens and certificates.

use super::*;

#[tokio::test]
async fn token_has_the_role_and_the_tenant_of_its_line() {
    let file = role_tokens();
    let served = serve(&config(false, false, Some(&file))).await;
    let mut kept = Kept::plain(&served).await;
    let made = kept.ask("POST", "/v1/sandboxes", Some(OPERATE), CREATE).await;
    assert_eq!(made.0, 201, "{}", made.1);
    assert!(made.1.contains(r#""tenant":"acme""#), "{}", made.1);
    for (token, method, path, body, status) in [
        (READ, "GET", "/v1/sandboxes/web", "", 200),
        (READ, "POST", "/v1/sandboxes", CREATE, 403),
        (READ, "DELETE", "/v1/sandboxes/web", "", 403),
        (
            READ,
            "POST",
            "/v1/sandboxes/web/exec",
            r#"{"command":["x"]}"#,
            403,
        ),
        (READ, "GET", "/metrics", "", 403),
        (OPERATE, "GET", "/metrics", "", 403),
        (OPERATE, "POST", "/v1/node/drain", "", 403),
        (OTHER, "GET", "/v1/sandboxes/web", "", 404),
        (OTHER, "DELETE", "/v1/sandboxes/web", "", 404),
        (TOKEN, "GET", "/metrics", "", 200),
        (TOKEN, "GET", "/v1/sandboxes/web", "", 404),
        (EXPIRED, "GET", "/v1/sandboxes/web", "", 401),
        (OPERATE, "DELETE", "/v1/sandboxes/web", "", 204),
    ] {
        let answer = kept.ask(method, path, Some(token), body).await;
        assert_eq!(answer.0, status, "{token} {method} {path}: {}", answer.1);
    }
}

#[tokio::test]
async fn ten_thousand_wrong_tokens_are_refused() {
    let file = role_tokens();
    let served = serve(&config(false, false, Some(&file))).await;
    let mut kept = Kept::plain(&served).await;
    let known = [TOKEN, OPERATE, READ, OTHER];
    for n in 0..10_000_usize {
        let token = known[n % known.len()];
        let at = n / 5 % token.len();
        let wrong = match n % 5 {
            // Shortened, extended, with another digit, with a half of another token, or the name instead.
            0 => token[..at].to_owned(),
            1 => format!("{token}{}", &token[..=at]),
            2 => format!("{}~{}", &token[..at], &token[at + 1..]),
            3 => format!(
                "{}{}",
                &token[token.len() / 2..],
                &known[(n + 1) % known.len()][..token.len() / 2]
            ),
            _ => ["admin", "operate", "read", "other", EXPIRED][n / 5 % 5].to_owned(),
        };
        assert!(!known.contains(&wrong.as_str()), "{wrong}");
        let (status, answer) = kept.ask("GET", "/v1/sandboxes", Some(&wrong), "").await;
        assert_eq!(status, 401, "{wrong}: {answer}");
        assert!(!known.iter().any(|token| answer.contains(token)), "{answer}");
    }
    for token in known {
        assert_eq!(kept.ask("GET", "/v1/sandboxes", Some(token), "").await.0, 200);
    }
}

#[tokio::test]
async fn session_with_a_sandbox_of_another_tenant_is_not_opened() {
    let file = role_tokens();
    let served = serve(&config(false, false, Some(&file))).await;
    let made = Kept::plain(&served)
        .await
        .ask("POST", "/v1/sandboxes", Some(OPERATE), CREATE)
        .await
        .1;
    let made: thaw_protocol::api::CreatedSandbox = serde_json::from_str(&made).unwrap();
    let open = async |token: &str, subject: &str| {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        let head = format!(
            "GET /v1/sandboxes/{subject}/exec HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{}\r\n",
            bearer(token)
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        String::from_utf8(status.to_vec()).unwrap()
    };
    for subject in ["web", made.sandbox.id.as_str()] {
        assert_eq!(open(OPERATE, subject).await, "HTTP/1.1 101");
        assert_eq!(open(OTHER, subject).await, "HTTP/1.1 404");
        assert_eq!(open(READ, subject).await, "HTTP/1.1 403");
        assert_eq!(open("wrong", subject).await, "HTTP/1.1 401");
    }
}

#[tokio::test]
async fn certificate_has_the_role_that_the_file_gives_it_now() {
    let (tokens, roles) = (
        role_tokens(),
        client_roles(&format!("{BUILDER}dns:client role=read tenant=acme")),
    );
    let served = serve(&ApiConfig {
        client_roles: Some(roles.path().to_owned()),
        ..config(true, true, Some(&tokens))
    })
    .await;
    let mut client = Kept::over(tls(&served, Some("client")).await.unwrap()).await;
    let mut builder = Kept::over(tls(&served, Some("workload")).await.unwrap()).await;
    let create = ("POST", "/v1/sandboxes", CREATE);
    assert_eq!(builder.ask(create.0, create.1, None, create.2).await.0, 201);
    assert_eq!(client.ask("GET", "/v1/sandboxes/web", None, "").await.0, 200);
    let refused = client.ask(create.0, create.1, None, create.2).await;
    assert_eq!(refused.0, 403);
    assert!(refused.1.contains("role-too-low"), "{}", refused.1);
    assert_eq!(builder.ask("POST", "/v1/node/drain", None, "").await.0, 403);
    // If the certificate has a role, it identifies the caller, whatever the token.
    assert_eq!(client.ask(create.0, create.1, Some(TOKEN), create.2).await.0, 403);

    // Both certificates are from the right authority and on open connections; only the file has changed.
    std::fs::write(roles.path(), BUILDER).unwrap();
    served.credentials.reload().unwrap();
    let refused = client.ask("GET", "/v1/sandboxes/web", None, "").await;
    assert_eq!(refused.0, 403);
    assert!(refused.1.contains("no-role"), "{}", refused.1);
    assert_eq!(
        client.ask("GET", "/v1/sandboxes/web", Some("wrong"), "").await.0,
        403
    );
    assert_eq!(
        client.ask("GET", "/v1/sandboxes/web", Some(READ), "").await.0,
        200
    );
    assert_eq!(
        client.ask("GET", "/v1/sandboxes/web", Some(OTHER), "").await.0,
        404
    );
    assert_eq!(builder.ask("GET", "/v1/sandboxes/web", None, "").await.0, 200);

    // The certificate's names have different grants.
    std::fs::write(
        roles.path(),
        format!("{BUILDER}dns:builder.acme.example role=admin"),
    )
    .unwrap();
    served.credentials.reload().unwrap();
    let refused = builder.ask("GET", "/v1/sandboxes/web", None, "").await;
    assert_eq!(
        (refused.0, refused.1.contains("different roles")),
        (403, true),
        "{}",
        refused.1
    );

    // An invalid file changes nothing.
    std::fs::write(roles.path(), "client role=admin").unwrap();
    assert!(served.credentials.reload().is_err());
    assert_eq!(client.ask("GET", "/v1/sandboxes/web", None, "").await.0, 403);
    for name in ["stranger", "expired"] {
        assert!(
            over_tls(&served, Some(name), &bearer(TOKEN)).await.is_err(),
            "{name}"
        );
    }
}

#[tokio::test]
async fn certificate_without_client_roles_is_an_administrators() {
    let served = serve(&config(true, true, None)).await;
    let mut client = Kept::over(tls(&served, Some("client")).await.unwrap()).await;
    assert_eq!(client.ask("GET", "/metrics", None, "").await.0, 200);
}
