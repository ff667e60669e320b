// The page's files, and a table of them for web_routes.cc: path, begin, end; a null path ends it.
  .macro asset path, file
  .section .rodata
8000:
  .asciz "\path"
8001:
  .incbin "\file"
8002:
  .section .data.rel.ro,"aw"
  .quad 8000b, 8001b, 8002b
  .endm

  .macro asset_file file
  asset "/web/\file", "\file"
  .endm

  .section .data.rel.ro,"aw"
  .balign 8
  .global freshet_web_assets
freshet_web_assets:
  asset "/", "index.html"
  asset_file "style.css"
  asset_file "message.css"
  asset_file "icon.svg"
  asset_file "answer.js"
  asset_file "api.js"
  asset_file "app.js"
  asset_file "chart.js"
  asset_file "chat.js"
  asset_file "conversation.js"
  asset_file "dashboard.js"
  asset_file "dom.js"
  asset_file "files.js"
  asset_file "history.js"
  asset_file "markdown.js"
  asset_file "math_rules.js"
  asset_file "message.js"
  asset_file "panels.js"
  asset_file "prometheus.js"
  asset_file "settings.js"
  asset_file "shortcuts.js"
  asset_file "store.js"
  asset_file "theme.js"
  asset_file "tokens.js"
  asset_file "transfer.js"
  asset_file "vendor/highlight.js"
  asset_file "vendor/katex.js"
  asset_file "vendor/markdown-it.js"
  .section .data.rel.ro,"aw"
  .quad 0, 0, 0

  .section .note.GNU-stack,"",%progbits
